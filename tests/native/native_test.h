// What the files of native_test share.

#pragma once

#include <string>

namespace native_test {

void check(bool condition, const std::string & what); // prints one line

void test_vtables();

} // namespace native_test
