# Files of the package beside the two libraries: _build_config.py, the headers of csrc (include/quartz) and the CMake
# package (share/cmake/quartz). QUARTZ_INSTALL_IN_PLACE puts all of them into python/torch_quartz.

if(QUARTZ_WITH_CUDA)
  set(QUARTZ_PYTHON_WITH_CUDA True)
  set(QUARTZ_BUILT_CUDA_ARCHITECTURES "${QUARTZ_CUDA_ARCHITECTURES}")
else()
  set(QUARTZ_PYTHON_WITH_CUDA False)
endif()
set(_package "${CMAKE_CURRENT_BINARY_DIR}/torch_quartz")
configure_file("${CMAKE_CURRENT_LIST_DIR}/_build_config.py.in" "${_package}/_build_config.py" @ONLY)
configure_file("${CMAKE_CURRENT_LIST_DIR}/quartzConfig.cmake.in" "${_package}/share/cmake/quartz/quartzConfig.cmake"
               @ONLY)
include(CMakePackageConfigHelpers)
write_basic_package_version_file("${_package}/share/cmake/quartz/quartzConfigVersion.cmake"
                                 COMPATIBILITY SameMinorVersion)

install(FILES "${_package}/_build_config.py" DESTINATION torch_quartz)
install(DIRECTORY "${_package}/share/cmake/quartz" DESTINATION torch_quartz/share/cmake)
install(
  DIRECTORY csrc/
  DESTINATION torch_quartz/include/quartz
  FILES_MATCHING
  PATTERN "*.h"
  PATTERN "*.cuh"
  PATTERN "tests" EXCLUDE)

if(QUARTZ_INSTALL_IN_PLACE)
  # A target of its own that always runs: a build folder for another torch may have written there since.
  set(_libraries "$<TARGET_FILE:quartz>")
  if(QUARTZ_BUILD_PYTHON)
    string(APPEND _libraries "|$<TARGET_FILE:_C>")
  endif()
  add_custom_target(
    in_place ALL
    COMMAND "${CMAKE_COMMAND}" -D "LIBRARIES=${_libraries}" -D "GENERATED=${_package}" -D
            "SOURCE=${CMAKE_CURRENT_SOURCE_DIR}" -P "${CMAKE_CURRENT_LIST_DIR}/InPlace.cmake"
    VERBATIM)
  add_dependencies(in_place quartz)
  if(QUARTZ_BUILD_PYTHON)
    add_dependencies(in_place _C)
  endif()
endif()
