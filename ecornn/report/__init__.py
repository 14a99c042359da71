"""A tuning log as one HTML page that needs no network: `ecornn report`.

``searches.py`` what a log says of each search, ``effects.py`` what its knobs did, ``layers.py`` the best of every layer
and its floor, ``measured.py`` what results say beside it, ``svg.py`` pictures, ``page.py`` and ``page.html`` the page.
"""
