"""A tuning log as one HTML page that needs no network: `ecornn report`. ``page.py`` and ``page.html`` are the page."""
