"""How values of several ranks become one, with NumPy alone.

kernels         sum, mean, minimum, maximum and product of the bytes of several ranks
"""
