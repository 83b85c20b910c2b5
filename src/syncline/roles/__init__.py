"""The coordinator and the servers. Never imports client/."""
