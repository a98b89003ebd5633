"""Policies of other papers, to compare with: entry points of the group oallama.policies."""
