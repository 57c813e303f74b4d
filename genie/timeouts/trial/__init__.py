"""Ledgers to try a handler with: transfers by chance, dates that are moved, states that become final.

After the queries and the program that the document "Design Timeout DAO Layer" was tried with. For ledgers that nobody
else needs.
"""
