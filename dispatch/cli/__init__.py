"""The command `dispatch`."""
