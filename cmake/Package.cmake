# Files of the package beside the two libraries: _build_config.py, the headers of csrc (include/quartz) and the CMake
# package (share/cmake/quartz). In place they are written, or linked, into python/torch_quartz.

string(TOUPPER "${QUARTZ_WITH_CUDA}" QUARTZ_WITH_CUDA)
if(QUARTZ_WITH_CUDA)
  set(QUARTZ_PYTHON_WITH_CUDA True)
else()
  set(QUARTZ_PYTHON_WITH_CUDA False)
endif()
configure_file("${CMAKE_CURRENT_LIST_DIR}/_build_config.py.in" "${_package}/_build_config.py" @ONLY)
configure_file("${CMAKE_CURRENT_LIST_DIR}/quartzConfig.cmake.in" "${_package}/share/cmake/quartz/quartzConfig.cmake"
               @ONLY)
include(CMakePackageConfigHelpers)
write_basic_package_version_file("${_package}/share/cmake/quartz/quartzConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)

if(QUARTZ_INSTALL_IN_PLACE)
  file(MAKE_DIRECTORY "${_package}/include")
  file(CREATE_LINK "${CMAKE_CURRENT_SOURCE_DIR}/csrc" "${_package}/include/quartz" SYMBOLIC)
endif()

install(FILES "${_package}/_build_config.py" DESTINATION torch_quartz)
install(DIRECTORY "${_package}/share/cmake/quartz" DESTINATION torch_quartz/share/cmake)
install(
  DIRECTORY csrc/
  DESTINATION torch_quartz/include/quartz
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN "*.cuh"
  PATTERN "tests" EXCLUDE)
