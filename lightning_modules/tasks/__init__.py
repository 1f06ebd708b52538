"""Questions about long texts: what is asked, how it is worded, how long it is, and when an answer is right."""
