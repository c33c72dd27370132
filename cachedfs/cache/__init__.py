"""The persistent block cache on local disk, shared by all processes of a machine."""
