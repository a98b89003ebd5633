// Memory refused to a thread, in a program that refused_memory.cpp is part of.

#pragma once

extern thread_local bool out_of_memory; // operator new fails
