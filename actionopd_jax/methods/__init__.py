"""Methods: which states and responses are collected, and which weights their tokens get."""
