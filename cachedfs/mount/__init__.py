"""Mount a URL as a folder, for programs that read paths and not URLs (extra `mount`)."""
