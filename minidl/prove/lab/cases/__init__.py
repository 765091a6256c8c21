"""One module a case: each a program that can be read and run by itself."""
