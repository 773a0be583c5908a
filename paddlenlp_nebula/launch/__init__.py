"""Starting clusters on this machine, watching them, and leaving no process behind."""
