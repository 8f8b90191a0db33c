from petit_plugin.cli import main

main()
