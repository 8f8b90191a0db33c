"""Present so that pytest puts this directory on sys.path: tests share helpers through `from fixtures import ...`."""
