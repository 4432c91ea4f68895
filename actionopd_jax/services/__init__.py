"""Clients of what is outside: teacher, matcher, and the cache of what was paid for."""
