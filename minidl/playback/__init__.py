"""Playback: the state of a recorded run at any of its events."""
