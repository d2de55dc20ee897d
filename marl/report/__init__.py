"""The report of a run or of a sweep: transcripts, figures, page."""
