"""The canary inside engines that do not know about it.

Shared parts, which know no engine, and one package per engine. The core below imports
nothing from here.
"""
