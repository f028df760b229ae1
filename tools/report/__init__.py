"""RUN/report: the findings about a run as one self-contained HTML page. Start at `page.write_report`."""
