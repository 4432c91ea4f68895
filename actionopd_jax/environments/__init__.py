"""Environments, one file or folder each; `load` finds them by name and imports them only when used."""
