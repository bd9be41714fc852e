// Visibility of the symbols that programs outside libquartz.so may link against. Everything else is hidden.
#pragma once

#define QUARTZ_API __attribute__((visibility("default")))
