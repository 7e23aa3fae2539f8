# Finds the NCCL that LibTorch's wheel depends on (site-packages/nvidia/nccl), and only without it one of the system: a program must
# not load two. Call it after find_package(LibTorch).
#
# Output:  NCCL::nccl
#          NCCL_VERSION
get_filename_component(_site_packages "${TESSERA_LIBTORCH}" DIRECTORY)
find_path(NCCL_INCLUDE_DIR nccl.h HINTS "${_site_packages}/nvidia/nccl/include" NO_CACHE)
find_library(NCCL_LIBRARY NAMES libnccl.so.2 nccl HINTS "${_site_packages}/nvidia/nccl/lib" NO_CACHE)
if(NCCL_INCLUDE_DIR)
  file(STRINGS "${NCCL_INCLUDE_DIR}/nccl.h" _version REGEX "define NCCL_(MAJOR|MINOR|PATCH) [0-9]+")
  string(REGEX REPLACE "[^0-9;]" "" NCCL_VERSION "${_version}")
  list(JOIN NCCL_VERSION "." NCCL_VERSION)
endif()

include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(NCCL REQUIRED_VARS NCCL_LIBRARY NCCL_INCLUDE_DIR VERSION_VAR NCCL_VERSION)

if(NCCL_FOUND AND NOT TARGET NCCL::nccl)
  add_library(NCCL::nccl SHARED IMPORTED)
  set_target_properties(NCCL::nccl PROPERTIES IMPORTED_LOCATION "${NCCL_LIBRARY}")
  target_include_directories(NCCL::nccl SYSTEM INTERFACE "${NCCL_INCLUDE_DIR}")
endif()
