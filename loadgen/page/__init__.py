"""One self-contained HTML file from numbers: what a page is (`content`), and how it becomes HTML (`html`)."""
