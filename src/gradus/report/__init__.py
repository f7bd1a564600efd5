"""What runs did, as a page to read and to hand in: tables, plots, HTML, PDF, from their rows alone."""
