# `cmake --install`: the public headers below include/tessera, the libraries, and a package that `find_package(tessera)` finds.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# The public headers are tessera.h and those that it includes, directly or not.
set(waiting tessera.h)
set(public_headers "")
while(waiting)
  list(POP_FRONT waiting header)
  if(NOT header IN_LIST public_headers)
    list(APPEND public_headers "${header}")
    set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS "${header}")
    file(STRINGS "${header}" includes REGEX "^#include <tessera/")
    list(TRANSFORM includes REPLACE "^#include <tessera/(.+)>.*$" "\\1")
    list(APPEND waiting ${includes})
  endif()
endwhile()
foreach(header IN LISTS public_headers)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES "${header}" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera/${folder}")
endforeach()

set(libraries_path "$ORIGIN;${TESSERA_LIBTORCH}/lib")
install(TARGETS tessera EXPORT tesseraTargets DESTINATION "${CMAKE_INSTALL_LIBDIR}"
  INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
set_target_properties(tessera PROPERTIES INSTALL_RPATH "${libraries_path}")
if(TARGET tessera_bench)
  install(FILES benchmarks/bench.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera/benchmarks")
  install(TARGETS tessera_bench EXPORT tesseraTargets DESTINATION "${CMAKE_INSTALL_LIBDIR}"
    INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
  set_target_properties(tessera_bench PROPERTIES INSTALL_RPATH "${libraries_path}")
endif()
if(TARGET tessera_nccl)
  get_filename_component(nccl "${NCCL_LIBRARY}" DIRECTORY)
  install(TARGETS tessera_nccl DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  set_target_properties(tessera_nccl PROPERTIES INSTALL_RPATH "${libraries_path};${nccl}")
endif()

set(package "${CMAKE_INSTALL_LIBDIR}/cmake/tessera")
install(EXPORT tesseraTargets NAMESPACE tessera:: DESTINATION "${package}")
configure_package_config_file(cmake/tesseraConfig.cmake.in "${PROJECT_BINARY_DIR}/cmake/tesseraConfig.cmake"
  INSTALL_DESTINATION "${package}")
write_basic_package_version_file("${PROJECT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${PROJECT_BINARY_DIR}/cmake/tesseraConfig.cmake" "${PROJECT_BINARY_DIR}/cmake/tesseraConfigVersion.cmake"
  cmake/FindLibTorch.cmake DESTINATION "${package}")
