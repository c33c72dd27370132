"""Types and helpers used by all other packages; this package depends on none of them."""
