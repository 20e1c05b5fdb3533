"""Attention: layouts, masks, problems and strategies (pure), plans and their execution, the
autograd function, the public call.
"""
