# Fails when a *_test.cpp below FOLDER is not in the list REGISTERED.
file(STRINGS "${REGISTERED}" registered)
file(GLOB_RECURSE found "${FOLDER}/*_test.cpp")
list(REMOVE_ITEM found ${registered})
if(found)
  list(JOIN found "\n  " found)
  message(FATAL_ERROR "no tessera_test() names these files:\n  ${found}")
endif()
