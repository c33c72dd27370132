"""Origins: clients that read and write objects at a remote service."""
