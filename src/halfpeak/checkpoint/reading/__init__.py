"""Reading what somebody else saved, of any kind, as data: nothing in a file is executed."""
