"""Tasks are killed or suspended at any event of a training: all that it leaves behind is as without that."""
