"""The commands of `petit` that read or compute; the command line itself is petit_cli."""
