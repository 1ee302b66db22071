import cython
