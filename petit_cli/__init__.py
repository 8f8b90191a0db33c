"""The `petit` command, outside petit_plugin so that it starts without torch and can report what that lacks.

Here are the commands' options, what they print, and `petit doctor`; the others' code is in petit_plugin/cli.
"""


def main() -> None:
    """Entry point of the console script."""
    from petit_cli.app import app

    app(prog_name="petit")


__all__ = ["main"]
