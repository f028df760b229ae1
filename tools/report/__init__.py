"""RUN/report: the findings about a run as one HTML page that needs nothing else. Start at `page.write_report`."""
