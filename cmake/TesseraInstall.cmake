# `cmake --install`: the headers below include/tessera, the libraries, and a package that `find_package(tessera)` finds.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

install(DIRECTORY collectives mesh dtensor mixed_precision optim fsdp checkpoint
  DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera" FILES_MATCHING PATTERN "*.h")
install(FILES tessera.h DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}/tessera")

set(libraries_path "$ORIGIN;${TESSERA_LIBTORCH}/lib")
install(TARGETS tessera EXPORT tesseraTargets DESTINATION "${CMAKE_INSTALL_LIBDIR}")
set_target_properties(tessera PROPERTIES INSTALL_RPATH "${libraries_path}")
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
