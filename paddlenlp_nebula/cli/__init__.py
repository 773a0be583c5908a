"""The ``nebula`` command."""
