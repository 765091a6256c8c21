"""What a trace amounts to: figures, verdicts, comparisons."""
