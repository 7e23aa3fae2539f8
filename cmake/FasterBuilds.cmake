# A compiler cache and a fast linker, where the machine has them.
find_program(TESSERA_CCACHE ccache)
if(TESSERA_CCACHE)
  # Paths relative to the source tree let other copies of it share the cache; the sloppiness is what a precompiled header needs.
  # The compiler's list of headers tells what a source depends on, so that a build with an empty cache does not preprocess twice.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env "CCACHE_BASEDIR=${CMAKE_SOURCE_DIR}" CCACHE_DEPEND=1
    "CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime" ${TESSERA_CCACHE})
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU" AND NOT CMAKE_DISABLE_PRECOMPILE_HEADERS)
    add_compile_options(-fpch-preprocess) # without it, ccache gives up on what uses a precompiled header of GCC's
  elseif(CMAKE_CXX_COMPILER_ID MATCHES "Clang")
    add_compile_options("SHELL:-Xclang -fno-pch-timestamp") # the same headers give the same precompiled header
  endif()
endif()

find_program(TESSERA_MOLD mold)
if(TESSERA_MOLD)
  add_link_options(-fuse-ld=mold)
endif()
