# One C++ runtime for the process. A compiler set up to link libstdc++ statically would put a second copy of it into
# libquartz.so, and streams, locales and exceptions that cross to libtorch would then crash. Whether this compiler does
# so is seen on a small library; quartz_stdlib then links the shared one by name.
set(_probe "${CMAKE_CURRENT_BINARY_DIR}/stdlib_probe")
file(WRITE "${_probe}.cpp" "#include <sstream>\nstd::string probe(int x) { std::ostringstream s; s << x; return s.str(); }\n")
execute_process(COMMAND "${CMAKE_CXX_COMPILER}" -shared -fPIC "${_probe}.cpp" -o "${_probe}.so" OUTPUT_QUIET ERROR_QUIET)
execute_process(COMMAND "${CMAKE_READELF}" -d "${_probe}.so" OUTPUT_VARIABLE _needed ERROR_QUIET)
add_library(quartz_stdlib INTERFACE)
if(NOT _needed MATCHES "libstdc\\+\\+|libc\\+\\+")
  message(STATUS "This compiler links libstdc++ statically: linking the shared one by name")
  target_link_options(quartz_stdlib INTERFACE -nostdlib++)
  target_link_libraries(quartz_stdlib INTERFACE -l:libstdc++.so.6 m)  # -nostdlib++ drops libm as well
endif()
