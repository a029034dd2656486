"""The canary inside engines that know nothing of it.

Shared parts, which know no engine, and one package per engine. The core below imports
nothing from here.
"""
