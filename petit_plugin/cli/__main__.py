from petit_cli import main

main()
