"""A server: hosts slices, orders and applies commits, keeps backups."""
