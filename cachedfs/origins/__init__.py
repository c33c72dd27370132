"""Origins: what reads and writes objects at a service over the network."""
