"""Tests of paged attention from Python."""
