"""One module a case: the faulty part of a program; `minidl lab NAME` runs it."""
