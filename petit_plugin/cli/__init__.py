"""The `petit` command."""


def main() -> None:
    """Entry point of the console script."""
    from petit_plugin.cli.app import app

    app(prog_name="petit")


__all__ = ["main"]
