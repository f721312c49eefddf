"""Adapters, a file or folder per framework. They convert shapes, choose the group, and state which code sums dE over ranks."""
