"""Views of a trace: text, pictures, pages, viewers."""
