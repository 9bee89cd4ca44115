"""Keeps the workers of one node alive, or says why not. Started by command; torch never enters this process."""
