"""The web page of a job, its API and its metrics for Prometheus. Needs the extra `page`.

`access` decides who may read and `hosts` under which names, `runs` finds what can be read, `api` answers (`openapi`
describes it, `openmetrics` is for Prometheus), `live` streams looks, `application` puts these together, `connections`
bounds what strangers hold open, and `serving` runs it in a thread beside a
coordinator, or alone for runs that have ended.
"""
