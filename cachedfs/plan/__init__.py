"""Pure decisions: arguments in, values out. No async, no I/O, no clock, no randomness, no logging."""
